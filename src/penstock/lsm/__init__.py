"""The log-structured merge tree: sorted Arrow files (sstables) with a hash index beside each, and the merges that keep
them few. A tree holds one shard of a table.

A write:

    tree               the tree: applies edits, freezes memtables, swaps in a new version for every change
    tree_settings      sizes, and when writers are slowed; statistics of a tree
    memtable           rows that are in no file yet
    key_order          the keys of a memtable in order
    version            the immutable state of a tree: memtables and the files of each level

A flush or compaction:

    tasks              the periodic tasks that look for work, and the runners of its jobs
    maintenance        all trees of a store, and the durable jobs on their files
    tree_jobs          one flush or compaction: write files, commit them to the manifest, swap them in
    sorted_rows        the rows of a frozen memtable in key order, for a flush
    compaction         which files to merge next
    merge              merges sorted files into sorted files
    order              the keys of a part of a merge, sorted
    operand_fold       folds the merge operands of a part of a merge
    merge_offers       a large merge, split by key and offered to a Spark driver
    manual_compaction  a compaction that a user requested
    tree_files         opens, writes and checks the sstables of a store
    writer             writes an sstable and its index
    catalog            the rows of a tree in the manifest

A read:

    view               gets and scans of one version
    snapshot           a tree at one LSN, for as long as a reader needs it
    probe              many keys that are looked up together
    scan_part          some rows of one memtable or file, in scan order
    sstable            reads an sstable
    index              the file beside an sstable: hash slots, offsets of batches, checksums of pages
    file_pieces        a key range of a snapshot, for readers in other processes

Rows:

    rows               rows as columns; their kinds and limits
    ranges             range deletes
    operators          merge operators: sums, minima, sets, and those that kinds register
    exact_sum          sums of float64 without rounding

Files that are no longer needed:

    file_use           files that are needed although the manifest does not list them
    readers            leases of readers in other processes, recorded so that the next opening respects them
    collection         deletes files that are neither listed nor read

For people:

    inspect            dumps and verifies one sstable
    metrics            trees and their jobs as metrics

docs/format/sstable.md gives the bytes.
"""
