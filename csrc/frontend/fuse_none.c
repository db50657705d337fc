// SPDX-License-Identifier: Apache-2.0
/* The FUSE front end of a build that found no libfuse3. */
#include "frontend/fuse_frontend.h"

const struct iswi_frontend_ops iswi_fuse_ops = {
	.name = "fuse",
	.missing = "this build has no FUSE front end: libfuse3 was not found when it was "
		   "compiled; install libfuse3-dev and pkg-config, then install again",
};
