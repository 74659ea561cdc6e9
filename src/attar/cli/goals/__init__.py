"""Plans by goals on the command line."""
