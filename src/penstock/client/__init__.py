"""The client: a store that another process owns, with the API of one's own. `penstock.connect` is in `connect`.

Nothing is imported here: the owner's bell needs a little of this package, and not Arrow Flight.
"""
