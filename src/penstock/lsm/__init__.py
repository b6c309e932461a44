"""The log-structured tree: sorted Arrow files with a hash index beside each, and the merge that keeps them few.

From below: `rows` (columns in memory), `operators` (named merges), `ranges` (range deletes), `index` (the file beside
an sstable), `writer` and `sstable` (write it, read it), `order` and `operand_fold` (a slice put in order, its operands
folded), `merge` (compaction as a pure function over files), `inspect` (for people). `memtable`, `version`, `view`,
`snapshot` and `tree` are the state of one tree and how it is read and written; `tree_files`, `tree_jobs` and
`maintenance` write, publish and swap its files; `file_use` and `collection` delete unneeded ones.
"""
