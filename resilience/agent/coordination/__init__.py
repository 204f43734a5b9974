"""Who numbers generations and who follows it: decisions, and the connections between agents."""
