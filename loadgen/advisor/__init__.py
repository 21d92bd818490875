"""Which fleet is enough: policies and replica counts searched in the simulator."""
