"""`make screenshots`, and the recorded scale-out that it shows."""
