"""Background work: tasks that repeat, durable jobs, and the engines that do the heavy part.

A `Scheduler` runs tasks by their timers and by events on a few threads. A `JobRunner` is such a task: it takes durable
jobs from the manifest and calls named functions on an engine, a pool of threads or of processes.
"""
