"""Moving requests between replicas: who gives to whom, which request, and the hand-shake that loses none.

`pairing.py` pairs replicas, `victims.py` picks the request, `refusals.py` names what cannot be carried; `handshake.py`
is the source's side of one move, `destination.py` the destination's, `events.py` what they take and give.
"""
