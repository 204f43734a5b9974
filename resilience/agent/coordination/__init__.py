"""Who numbers generations, who belongs to one, and whom an agent follows."""
