/* SPDX-License-Identifier: Apache-2.0 */
/* The front-end seam: how block requests come from the kernel or a client to the engine. */
#ifndef ISWI_FRONTEND_H
#define ISWI_FRONTEND_H

#include "isw.h"

struct iswi_frontend_ops {
	const char *name;
	/*
	 * Required. Blocking, control thread only: takes no further request, waits until the
	 * engine has ended those in flight, detaches, joins its threads, frees.
	 */
	void (*destroy)(isw_frontend *frontend);
};

/* Implementations embed this first. */
struct isw_frontend {
	const struct iswi_frontend_ops *ops;
};

#endif
