"""The floor of agents: the planner's questions as tools of the Model Context Protocol."""
