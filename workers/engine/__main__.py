"""`python -m workers.engine --port 8101` starts one reference engine."""

from workers.engine.config import parse
from workers.engine.server import run

if __name__ == "__main__":
    run(parse())
