"""Pages of the fleet: its instances, each with its log and actions, and the launch templates that start them."""
