/* SPDX-License-Identifier: Apache-2.0 */
/* Loads libraries at run time: a host may lack them, or brings its own updates of them. */
#define _GNU_SOURCE 1
#include <dlfcn.h>
#include <errno.h>
#include <string.h>

#include "util/util.h"

int iswi_load_functions(const char *library, const char *packages,
			const struct iswi_function *functions, size_t count,
			struct isw_error *error)
{
	/* Never unloaded: libraries leave things behind. Opened again it is the same one. */
	void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);

	if (handle == NULL)
		return iswi_error(error, -ENOENT, "%s is not installed (Debian: apt install %s)",
				  library, packages);
	for (size_t i = 0; i < count; i++) {
		void *address = dlsym(handle, functions[i].name);

		if (address == NULL)
			return iswi_error(error, -ENOENT, "%s has no function %s: it is too old",
					  library, functions[i].name);
		memcpy(functions[i].address_out, &address, sizeof(address));
	}
	return 0;
}
