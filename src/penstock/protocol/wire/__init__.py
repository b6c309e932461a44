"""What an owner and its clients say to each other, and how it is encoded.

A message carries a write's sections in the form they have in the journal. Arrow is sent only from the owner to clients.
An error is sent as its class name and message.

    messages   the requests and answers, and their limits
    codec      messages as bytes, checked before they are decoded
    faults     errors as messages
"""

from penstock.protocol.wire.codec import *  # noqa: F403
from penstock.protocol.wire.faults import *  # noqa: F403
from penstock.protocol.wire.messages import *  # noqa: F403
