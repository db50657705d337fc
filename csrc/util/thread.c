// SPDX-License-Identifier: Apache-2.0
#define _GNU_SOURCE 1
#include "util/util.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>

/* Linux 5.6; older headers lack it. */
#ifndef PR_SET_IO_FLUSHER
#define PR_SET_IO_FLUSHER 57
#endif

#define THREAD_NAME_BYTES 16

struct start {
	void *(*run)(void *);
	void *arg;
	char name[THREAD_NAME_BYTES];
};

static void *thread_main(void *opaque)
{
	struct start *start = opaque;
	void *(*run)(void *) = start->run;
	void *arg = start->arg;

	prctl(PR_SET_NAME, start->name);
	/* Best effort: it needs CAP_SYS_RESOURCE; doctor reads the outcome back from /proc. */
	prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0);
	free(start);
	return run(arg);
}

void iswi_thread_urgent(void)
{
	const struct sched_param lowest = {.sched_priority = 1};

	/* Best effort, and read back, as above. */
	(void)pthread_setschedparam(pthread_self(), SCHED_RR, &lowest);
}

/* A thread inherits the mask of its creator: blocked here, a signal never finds our threads. */
static int create_masked(pthread_t *thread_out, const pthread_attr_t *attr, struct start *start)
{
	sigset_t all, before;
	int err;

	sigfillset(&all);
	err = pthread_sigmask(SIG_SETMASK, &all, &before);
	if (err != 0)
		return err;
	err = pthread_create(thread_out, attr, thread_main, start);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	return err;
}

int iswi_thread_start(pthread_t *thread_out, const char *name, void *(*run)(void *), void *arg)
{
	struct start *start;
	pthread_attr_t attr;
	int err;

	start = malloc(sizeof(*start));
	if (start == NULL)
		return -ENOMEM;
	start->run = run;
	start->arg = arg;
	snprintf(start->name, sizeof(start->name), "%s", name);
	err = pthread_attr_init(&attr);
	if (err != 0)
		goto err_start;
	err = pthread_attr_setstacksize(&attr, ISWI_STACK_BYTES);
	if (err == 0)
		err = create_masked(thread_out, &attr, start);
	pthread_attr_destroy(&attr);
	if (err != 0)
		goto err_start;
	return 0;

err_start:
	free(start);
	return -err;
}
