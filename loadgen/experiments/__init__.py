"""Both papers' results by one command each: grids of conditions and seeds, simulated cell by cell."""
