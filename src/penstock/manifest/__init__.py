"""The control plane: tables, progress, files, jobs, metrics and generations, in one LMDB file.

`Manifest` is the entry point; `JobQueue` keeps durable jobs in it; `recover` reads the state of a store that ended.
Other processes never open the file: they ask its owner.
"""
