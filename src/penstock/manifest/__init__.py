"""The control plane: tables, progress, files, jobs, metrics and generations, in one LMDB file.

`Manifest` is the way in; `JobQueue` runs durable work on it; `recover` tells a store what it was doing. Other
processes never open the file: they ask its owner.
"""
