// SPDX-License-Identifier: Apache-2.0
#include "frontend/frontend.h"

#include <stddef.h>

void isw_frontend_destroy(isw_frontend *frontend)
{
	if (frontend != NULL)
		frontend->ops->destroy(frontend);
}
