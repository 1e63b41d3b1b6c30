"""Drop-in classes for the trainers of other libraries; each module requires its library."""
