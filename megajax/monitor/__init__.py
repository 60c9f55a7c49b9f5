"""What a run says about itself: one stream of records, and where it goes."""
