"""`make fuzz`: what no client, engine or peer of ours would send, for every role and every parser."""
