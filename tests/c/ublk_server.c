// SPDX-License-Identifier: Apache-2.0
/*
 * The ublk front end over a file in memory instead of an engine: what it does with the kernel, on
 * its own. Not a test but the server of tests/vm/test_ublk.py, which kills it:
 *
 *     ublk_server FILE MIB new          prints "device N", serves until SIGTERM, removes the device
 *     ublk_server FILE MIB standby N    prints "prepared"; on a line from stdin takes device N over
 *     ublk_server FILE MIB remove-by-force N    as an administrator's own tool may do
 *     ublk_server FILE MIB begin N      a successor that dies when it has begun to take over
 *     ublk_server FILE MIB break PID    to each queue of a server a command seems to be refused
 *
 * Requests end on a thread of its own in another order than they came, some inside submit, as with
 * the engine. What was answered is in FILE, whenever the process dies.
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "frontend/ublk.h"
#include "frontend/ublk_control.h"
#include "frontend_fixture.h"

#define REQUESTS_MAX 64u
#define FDS_MAX      256 /* of a server: more than it has */
#define IDENTITY     0x7465737475626c6bull

static void fail(const char *what, int code, const struct isw_error *error)
{
	fprintf(stderr, "%s: %s %s\n", what, strerror(-code), error != NULL ? error->text : "");
	exit(1);
}

static void must(int err, const char *what, const struct isw_error *error)
{
	if (err != 0)
		fail(what, err, error);
}

static void open_engine(const char *path, uint64_t bytes)
{
	int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	char *memory;

	if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0)
		fail(path, -errno, NULL);
	memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (memory == MAP_FAILED)
		fail(path, -errno, NULL);
	engine_start_on(memory, bytes, MIXED, REQUESTS_MAX);
}

/* ------------------------------------------------------------------------ serving */

static void say(const char *what, uint32_t number)
{
	printf("%s %u\n", what, number);
	fflush(stdout);
}

static isw_frontend *serve_new(void)
{
	struct isw_error error = {0};
	const struct isw_frontend_config config = {.identity = IDENTITY};
	struct isw_frontend_info info;
	isw_frontend *frontend;

	must(iswi_ublk_ops.start(&engine, &config, &frontend, &error), "new", &error);
	iswi_ublk_ops.info(frontend, &info);
	say("device", info.device_id);
	return frontend;
}

static isw_frontend *serve_after(uint32_t device)
{
	struct isw_error error = {0};
	const struct isw_frontend_config config = {.identity = IDENTITY, .device_id = device};
	isw_frontend *frontend;
	char line[16];

	must(iswi_ublk_ops.prepare(&engine, &config, &frontend, &error), "prepare", &error);
	if (mlockall(MCL_CURRENT | MCL_FUTURE) != 0)
		fail("mlockall", -errno, NULL);
	say("prepared", device);
	if (fgets(line, sizeof(line), stdin) == NULL) {
		iswi_ublk_ops.destroy(frontend); /* not needed: the device stays */
		exit(0);
	}
	must(iswi_ublk_ops.take_over(frontend, 60000, &error), "take over", &error);
	say("serving", device);
	return frontend;
}

/* isw_ublk_remove would refuse. */
static int remove_by_force(uint32_t device)
{
	struct isw_error error = {0};
	struct iswi_ublk_control control;

	must(iswi_ublk_control_open(&control, &error), "control", &error);
	must(iswi_ublk_stop(&control, device), "stop", NULL);
	must(iswi_ublk_del(&control, device), "delete", NULL);
	iswi_ublk_control_close(&control);
	return 0;
}

static int begin(uint32_t device)
{
	const struct timespec tick = {.tv_nsec = 2000000};
	struct isw_error error = {0};
	struct iswi_ublk_control control;
	int err;

	must(iswi_ublk_control_open(&control, &error), "control", &error);
	/* Until its server is dead. Who waits for us has a bound. */
	while ((err = iswi_ublk_start_recovery(&control, device)) == -EBUSY)
		nanosleep(&tick, NULL);
	must(err, "begin", NULL);
	return 0;
}

/* An answer for tag 0 that the kernel never gave. */
static void break_ring(struct io_uring *own, int ring)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(own);
	struct io_uring_cqe *cqe;
	int err;

	io_uring_prep_msg_ring(sqe, ring, (unsigned int)-EINVAL, 0, 0);
	err = io_uring_submit_and_wait(own, 1);
	if (err < 0 || io_uring_peek_cqe(own, &cqe) != 0 || cqe->res < 0)
		fail("message", err, NULL);
	io_uring_cqe_seen(own, cqe);
}

static int break_queues(pid_t pid)
{
	const int process = (int)syscall(SYS_pidfd_open, pid, 0);
	struct io_uring own;
	char path[64], name[64];

	if (process < 0 || io_uring_queue_init(1, &own, 0) != 0)
		fail("break", -errno, NULL);
	for (int fd = 0; fd < FDS_MAX; fd++) {
		ssize_t got;
		int ring;

		snprintf(path, sizeof(path), "/proc/%d/fd/%d", (int)pid, fd);
		got = readlink(path, name, sizeof(name) - 1);
		name[got > 0 ? got : 0] = '\0';
		if (strstr(name, "io_uring") == NULL)
			continue;
		ring = (int)syscall(SYS_pidfd_getfd, process, fd, 0);
		if (ring < 0)
			fail("ring", -errno, NULL);
		break_ring(&own, ring);
		close(ring);
	}
	return 0;
}

int main(int argc, char **argv)
{
	isw_frontend *frontend;
	sigset_t ends;
	int got;

	if (argc < 4)
		fail("usage: ublk_server FILE MIB new|standby N", -EINVAL, NULL);
	if (strcmp(argv[3], "remove-by-force") == 0)
		return remove_by_force(argc < 5 ? 0 : (uint32_t)strtoul(argv[4], NULL, 10));
	if (strcmp(argv[3], "begin") == 0)
		return begin(argc < 5 ? 0 : (uint32_t)strtoul(argv[4], NULL, 10));
	if (strcmp(argv[3], "break") == 0)
		return break_queues(argc < 5 ? 0 : (pid_t)strtoul(argv[4], NULL, 10));
	sigemptyset(&ends);
	sigaddset(&ends, SIGTERM);
	pthread_sigmask(SIG_BLOCK, &ends, NULL);
	open_engine(argv[1], strtoull(argv[2], NULL, 10) << 20);
	frontend = argc == 4 ? serve_new() : serve_after((uint32_t)strtoul(argv[4], NULL, 10));
	sigwait(&ends, &got);
	iswi_ublk_ops.destroy(frontend);
	say(engine.down ? "down" : "removed", 0);
	return 0;
}
