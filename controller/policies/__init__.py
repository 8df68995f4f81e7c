"""Every published algorithm and baseline, one file each, registered by name in controller.core.policy."""
