"""What an owner and its clients share: how they find each other, and the messages between them.

The owner is the process that has a store open; clients are other processes that use the store through it.

    folder   checks the folder that a user names for a store
    locator  how processes on one machine find the owner: its sockets, the lock for opening
    report   the first line that an owner prints when a client has started it
    wire     the messages, and their bytes
"""
