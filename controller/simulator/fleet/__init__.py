"""What serves in a simulation: engines, their network, scaling, failures, and what can be observed of them."""
