"""What our plug-ins use of other engines, as tables, which are compared with the source in a wheel."""
