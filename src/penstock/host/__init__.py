"""The machine under Penstock: files, time, randomness and threads.

Everything that touches the operating system's files, its clocks or its entropy is in this package. The rest of
Penstock gets these passed in, which is what makes it testable against crashes (`penstock.testing`).

Files:

    files            the protocols `FileSystem`, `File`, `Folder` and `Lock`, which all other packages use
    file_operations  operations of several steps on them: durable renames, reserved space, folder trees
    os_files         the implementation on this machine
    open_files       a cache of descriptors, so that many open files share a few
    mappings         memory-mapped files that hold no descriptor, and a limit on their number
    file_locks       the lock on a store's folder
    owner_files      a file system that changes nothing once the locked folder was moved or replaced
    overlay_files    a file system whose changes stay in memory, for a store that is opened read-only
    file_errors      errors of the operating system as Penstock's
    paths            checks of the paths that users pass
    private_files    new files outside a store, such as keys, that only their owner can read

Time and randomness:

    clock            the protocol `Clock`: wall time and monotonic time
    steady_clock     the clock of a store, which follows the wall clock but never jumps
    randomness       the protocol `Random`, and the operating system's entropy

Threads and the process:

    threads          locks, threads, calls with and without interrupts, handlers at exit and after a fork
    waiting          retries until a deadline, periodic calls, stop signals
    forking          what a forked child must not use: objects of C libraries, its parent's sockets
    memory           returns freed memory to the system
    environment      environment variables
    lazy_imports     imports pandas before pyarrow would do so in the middle of a conversion
    decoders         decoders of MessagePack, made by one thread at a time
    metrics          counters, gauges and histograms, and Prometheus' text format
"""
