"""Where every weight is: boxes, layouts, family tables, the copy planner, safetensors folders."""
