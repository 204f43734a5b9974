"""The shared job and one worker for each peer; run by the peers' Python, not by ours."""
