"""A toy kind: accounts and the amounts booked on them. A small example of what a kind must provide.

    section     pending bookings: a list, its encoding, the rules for both
    machine     a shard: an LSM tree in which each booking is a row that is never replaced
    table       the API
    kind        the core and the capabilities `Loadable` and `Queryable`

It is not read by key: a booking has no name, and a balance is a sum over rows. Nothing in Penstock refers to it; tests
register it by an entry point, as another package would: see `penstock.registry`.
"""
