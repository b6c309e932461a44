"""A toy kind: accounts and the amounts booked on them. It shows what a kind has to bring, and is small on purpose.

    section     bookings on their way: a list, its bytes, the rules for both
    machine     a shard: a tree in which each booking is a row that nothing replaces
    table       what users call
    kind        the core and the capabilities `Loadable` and `Queryable`

It is not read by key: a booking has no name of its own, and a balance is a sum over rows. Nothing in Penstock knows it;
tests register it by an entry point, as any other package would: see `penstock.registry`.
"""
