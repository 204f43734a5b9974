"""What a generation communicates by: process groups, sockets, the gate, the agent's messages."""
