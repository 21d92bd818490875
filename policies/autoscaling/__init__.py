"""The size of the fleet: how many replicas there should be, by what they tell of their load.

`demand.py` adds up what replicas tell, `freeness.py` decides, `windows.py` has what lies between a decision and a step:
what a window needed, and Serve's delays for fleets that Serve does not run.
"""
