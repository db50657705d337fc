/* SPDX-License-Identifier: Apache-2.0 */
/* The FUSE front end of a build that found no libfuse3. */
#include <errno.h>

#include "frontend/frontend.h"
#include "util/util.h"

int isw_frontend_fuse(isw_engine *engine, const char *mountpoint, isw_frontend **frontend_out,
		      struct isw_error *error)
{
	(void)engine;
	(void)mountpoint;
	*frontend_out = NULL;
	return iswi_error(error, -ENOSYS,
			  "this build has no FUSE front end: libfuse3 was not found when it was "
			  "compiled; install libfuse3-dev and pkg-config, then install again");
}
