"""Matrix products with their communication hidden inside: schedules, and what they are worth."""
