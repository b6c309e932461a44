"""Background work: tasks that repeat, durable jobs, and the engines that do the heavy part.

A `Scheduler` runs tasks by their timers and by events on a few threads. A `JobRunner` is such a task: it takes durable
jobs from the manifest and calls named functions on an engine, a pool of threads or of processes.

Tasks:

    scheduler     the API and the worker threads
    task          the protocol of a task, and its statistics
    task_table    the registered tasks, what runs and what waits, shared by the workers
    plan          which task runs next, and when: pure functions
    metrics       the statistics of a scheduler as metrics

Durable jobs:

    durable_work  kinds of jobs: a task finds what is due and enqueues it, a runner runs it
    runner        leases a job, renews the lease while it runs, and records how it ended

Engines:

    engines       pools that run functions by name, on threads or in processes
    work          a function by name, with plain values as arguments and result
    processes     a worker process, from the side of its parent
    worker        the program of a worker process
    wire          the messages between the two
    offers        work that processes elsewhere, such as a Spark driver, poll for and do

docs/internals/scheduler.md tells more.
"""
