// SPDX-License-Identifier: Apache-2.0
/* Latency buckets, errors, whole reads, sockets, threads, and libraries that are loaded. */
#define _GNU_SOURCE 1
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "check.h"
#include "tests.h"
#include "util/util.h"

/* A latency lands in the bucket whose bound is the first above it. */
TEST(test_latency_buckets)
{
	static struct iswi_latency latency;

	for (uint32_t bucket = 1; bucket < ISW_LATENCY_BUCKETS; bucket++)
		CHECK(isw_latency_bucket_ns(bucket) > isw_latency_bucket_ns(bucket - 1));
	CHECK_EQ(isw_latency_bucket_ns(0), 288);
	CHECK_EQ(isw_latency_bucket_ns(7), 512);
	for (uint32_t bucket = 0; bucket < ISW_LATENCY_BUCKETS; bucket++) {
		uint64_t bound_ns = isw_latency_bucket_ns(bucket);

		iswi_latency_add(&latency, bound_ns - 1);
		CHECK_EQ(iswi_counted(&latency.bucket[bucket]), 1 + (bucket > 0));
		if (bucket + 1 < ISW_LATENCY_BUCKETS) {
			iswi_latency_add(&latency, bound_ns);
			CHECK_EQ(iswi_counted(&latency.bucket[bucket + 1]), 1);
		}
	}
	iswi_latency_add(&latency, 0);
	CHECK_EQ(iswi_counted(&latency.bucket[0]), 2);
	iswi_latency_add(&latency, UINT64_MAX);
	CHECK_EQ(iswi_counted(&latency.bucket[ISW_LATENCY_BUCKETS - 1]), 3);
}

TEST(test_error_text)
{
	struct isw_error error;
	char text[400];

	memset(text, 'x', sizeof(text) - 1);
	text[sizeof(text) - 1] = '\0';
	CHECK_EQ(iswi_error(NULL, -EINVAL, "%d", 1), -EINVAL);
	CHECK_EQ(iswi_error(&error, -ENOENT, "no %s", "slab"), -ENOENT);
	CHECK_EQ(error.code, -ENOENT);
	CHECK(strcmp(error.text, "no slab") == 0);
	iswi_error(&error, -EINVAL, "%s", text);
	CHECK_EQ(strlen(error.text), ISW_ERROR_TEXT_BYTES - 1);
}

TEST(test_read_full)
{
	char data[8];
	int fds[2];

	CHECK_EQ(pipe(fds), 0);
	CHECK_EQ(write(fds[1], "abc", 3), 3);
	CHECK_EQ(write(fds[1], "defgh", 5), 5);
	CHECK_EQ(iswi_read_full(fds[0], data, 8), 0);
	CHECK(memcmp(data, "abcdefgh", 8) == 0);
	CHECK_EQ(write(fds[1], "i", 1), 1);
	close(fds[1]);
	CHECK_EQ(iswi_read_full(fds[0], data, 2), -ENODATA);
	close(fds[0]);
	CHECK_EQ(iswi_read_full(fds[0], data, 2), -EBADF);
}

static void *look_around(void *opaque)
{
	sigset_t blocked;

	prctl(PR_GET_NAME, opaque);
	pthread_sigmask(SIG_SETMASK, NULL, &blocked);
	return sigismember(&blocked, SIGTERM) && sigismember(&blocked, SIGCHLD) ? opaque : NULL;
}

TEST(test_thread)
{
	char name[16];
	sigset_t mine;
	pthread_t thread;
	void *result;

	CHECK_EQ(iswi_thread_start(&thread, "a-name-that-is-too-long", look_around, name), 0);
	CHECK_EQ(pthread_join(thread, &result), 0);
	CHECK(result == name);
	CHECK(strcmp(name, "a-name-that-is-") == 0);
	pthread_sigmask(SIG_SETMASK, NULL, &mine);
	CHECK(!sigismember(&mine, SIGTERM));
}

/* How a socket that was of this congestion control is paced once it carries pages; "": not here. */
static const char *congestion_after(const char *before)
{
	static char name[16];
	socklen_t bytes = sizeof(name);
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	CHECK(fd >= 0);
	name[0] = '\0';
	if (setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, before, (socklen_t)strlen(before)) == 0) {
		iswi_page_socket_tune(fd);
		CHECK_EQ(getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &bytes), 0);
	}
	close(fd);
	return name;
}

TEST(pages_are_not_paced_by_an_estimate)
{
	const char *after = congestion_after("bbr");

	CHECK(strcmp(after, "") == 0 || strcmp(after, "cubic") == 0 || strcmp(after, "reno") == 0);
	after = congestion_after("reno");
	CHECK(strcmp(after, "") == 0 || strcmp(after, "reno") == 0);
}

TEST(test_functions_of_a_library)
{
	size_t (*length)(const char *text) = NULL;
	struct iswi_function wanted[] = {{"strlen", &length}, {"isw_no_such", &length}};
	struct isw_error error = {0};

	CHECK_OK(iswi_load_functions("libc.so.6", "libc6", wanted, 1, &error), error);
	CHECK_EQ(length("four"), 4);
	CHECK_EQ(iswi_load_functions("libc.so.6", "libc6", wanted, 2, &error), -ENOENT);
	CHECK(strstr(error.text, "libc.so.6 has no function isw_no_such") != NULL);
	CHECK_EQ(iswi_load_functions("libisw-none.so", "isw-none", wanted, 1, &error), -ENOENT);
	CHECK(strstr(error.text, "libisw-none.so is not installed") != NULL);
	CHECK(strstr(error.text, "apt install isw-none") != NULL);
}
