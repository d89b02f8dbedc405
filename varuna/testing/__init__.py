"""For users' own tests: scripted faults (``faults``), soaks (``soak``), replayed fleets (``replay``), emulated
clouds (``clouds``) and stages (``emulated``), workers in a fraction of a second (``forked``).
"""
