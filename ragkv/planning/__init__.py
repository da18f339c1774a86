"""What an ingest will cost, before it runs: chunks counted on a sample, times measured on a few of them."""
