"""How agents reach each other: addresses, the door, and what is said over a connection."""
