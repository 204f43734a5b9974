"""How a run grows and shrinks while it goes on."""
