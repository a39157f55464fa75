"""What a detector costs, and how mixtures of experts compare over seeds."""
