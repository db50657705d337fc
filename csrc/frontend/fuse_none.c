/* SPDX-License-Identifier: Apache-2.0 */
/* The FUSE front end of a build that found no libfuse3. */
#include <errno.h>
#include <unistd.h>

#include "frontend/frontend.h"
#include "util/util.h"

static int no_fuse(struct isw_error *error)
{
	return iswi_error(error, -ENOSYS,
			  "this build has no FUSE front end: libfuse3 was not found when it was "
			  "compiled; install libfuse3-dev and pkg-config, then install again");
}

int isw_frontend_fuse(isw_engine *engine, const char *mountpoint, isw_frontend **frontend_out,
		      struct isw_error *error)
{
	(void)engine;
	(void)mountpoint;
	*frontend_out = NULL;
	return no_fuse(error);
}

int isw_frontend_fuse_handover(isw_frontend *frontend, int32_t *fd_out, void *init_out,
			       struct isw_error *error)
{
	(void)frontend;
	(void)fd_out;
	(void)init_out;
	return no_fuse(error);
}

int isw_frontend_fuse_prepare(isw_engine *engine, const char *mountpoint, const void *init,
			      uint32_t init_bytes, isw_frontend **frontend_out,
			      struct isw_error *error)
{
	(void)engine;
	(void)mountpoint;
	(void)init;
	(void)init_bytes;
	*frontend_out = NULL;
	return no_fuse(error);
}

int isw_frontend_fuse_take_over(isw_frontend *frontend, int32_t fd, struct isw_error *error)
{
	(void)frontend;
	close(fd);
	return no_fuse(error);
}
