"""What planner and executor agree on: the files, the action text, the rules. Imports only msgspec."""
