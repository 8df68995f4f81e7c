"""Pages of traffic: requests, the queue, learned lengths, flows of shared links and uploaded traces."""
