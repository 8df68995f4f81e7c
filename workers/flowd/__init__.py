"""The transfer daemon of a host: it says which transfers may send now. `daemon` schedules and serves, `client` asks."""
