/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The front-end seam: how block requests come from the kernel or a client to the engine. A front
 * end is one const table of functions, declared in a header of its own; frontend.c lists the tables
 * and is all that calls them.
 */
#ifndef ISWI_FRONTEND_H
#define ISWI_FRONTEND_H

#include "isw.h"

struct iswi_frontend_ops {
	const char *name;
	/*
	 * NULL, or why this build lacks the front end, and what to install. Then the table has no
	 * functions, and isw_frontend_start and isw_frontend_prepare answer -ENOSYS.
	 */
	const char *missing;
	/*
	 * Required. Control thread, may block. Makes buffers and threads, then serves. On an error
	 * nothing stays, and *frontend_out is not looked at.
	 */
	int (*start)(isw_engine *engine, const struct isw_frontend_config *config,
		     isw_frontend **frontend_out, struct isw_error *error);
	/*
	 * Required. Control thread, may block: takes no further request, waits until the engine
	 * has ended those in flight, detaches, joins its threads, frees. Leaves the device of a
	 * predecessor that was not taken over.
	 */
	void (*destroy)(isw_frontend *frontend);
	/* Required. Any thread, never waits. *info_out is all zeros before. */
	void (*info)(const isw_frontend *frontend, struct isw_frontend_info *info_out);

	/*
	 * Optional: NULL where a successor has nothing to make. Control thread, may block. As
	 * start, of a process that waits for the predecessor's death: serves nothing yet.
	 */
	int (*prepare)(isw_engine *engine, const struct isw_frontend_config *config,
		       isw_frontend **frontend_out, struct isw_error *error);
	/*
	 * Optional: NULL where nothing but the kernel's device connects two processes. Any thread,
	 * never waits. The bytes of the note, or -errno.
	 */
	int (*handover)(isw_frontend *frontend, int32_t *fd_out, void *note_out,
			struct isw_error *error);
	/*
	 * Optional: NULL where nobody gives it connections. Any thread, or the control thread after
	 * prepare; may block. `fd` is borrowed.
	 */
	int (*serve)(isw_frontend *frontend, int32_t fd, struct isw_error *error);
	/*
	 * Optional: NULL where the kernel does not hand a device over. Control thread, after
	 * prepare; blocks for wait_ms_max.
	 */
	int (*take_over)(isw_frontend *frontend, uint32_t wait_ms_max, struct isw_error *error);
	/* Optional: NULL without io_urings. Control thread, never waits. How many there are. */
	int (*rings)(isw_frontend *frontend, int32_t *fds_out, uint32_t max);
};

/* Implementations embed this first. */
struct isw_frontend {
	const struct iswi_frontend_ops *ops;
};

#endif
