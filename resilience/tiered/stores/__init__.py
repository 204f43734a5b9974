"""The lower tiers: stores that outlive every node, a plain folder or S3."""
