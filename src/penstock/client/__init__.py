"""The client: a store that another process owns, with the API of an owned one. `penstock.connect` is in `connect`.

Nothing is imported here: the owner's bell needs a little of this package, without Arrow Flight.
"""
