"""What an ingest will cost, before it runs: chunks counted by sampling, times measured on a few of them."""
