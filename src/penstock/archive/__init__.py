"""The bytes of immutable files (chunks): containers, encryption keys, and object stores with copies of files.

Every chunk is written and read through a container: plain, or in blocks that are compressed and encrypted.

Containers:

    storage         how the files of a table are written: compression, and its keys if it is encrypted
    chunk           the identity of a chunk, and the protocols of its writer and reader
    container       creates and opens a chunk of either form
    plain           content as it is, memory-mapped
    framed          content in compressed and encrypted blocks

Keys:

    master_keys     the user's keys, from a file, the environment or a function; they wrap the keys of tables
    table_keys      the unwrapped keys of tables in this process, for whatever opens their files
    sealer          encrypts short byte strings with a table's key: journal sections, queue records, manifest rows

Object stores:

    objects         the protocol `ObjectStore`, and the names of objects
    object_urls     opens the object store of a URL, and tests its conditional puts
    folder_objects  a folder as an object store
    remote_objects  S3, Google Cloud, Azure, or memory, through the package obstore
    retrying        retries of network failures, within one deadline
    transfer        uploads, downloads and verification by checksum
    file_cache      fetched files in a folder of limited size
    fetching        archived sstables for a process that does not own the store, such as a Spark task

docs/format/container.md and docs/format/archive.md give the bytes.
"""
