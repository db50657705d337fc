/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The FUSE front end over an engine made for this test: bytes in memory, completions inside
 * submit, from another thread in reverse order, or held back until the test lets them go.
 */
#define OWN_MAIN
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/capability.h>
#include <signal.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "frontend_fixture.h"
#include "tests_between.h"

#define SECONDS_MAX   60
#define HAMMERS       4
#define HAMMER_ROUNDS 400

/* ------------------------------------------------------------------- helpers */

static char mountpoint[] = "/tmp/isw-test-fuse-XXXXXX";
static char disk[PATH_MAX];
static isw_frontend *frontend;

static int mount_at(const char *path, struct isw_error *error)
{
	const struct isw_frontend_config config = {.path = path};

	return isw_frontend_start(&engine, "fuse", &config, &frontend, error);
}

static void start(enum completion completion, uint32_t requests_max)
{
	struct isw_error error = {0};
	int err;

	engine_start(completion, requests_max);
	err = mount_at(mountpoint, &error);
	if (err)
		fprintf(stderr, "%s\n", error.text);
	CHECK_EQ(err, 0);
	snprintf(disk, sizeof(disk), "%s/disk", mountpoint);
}

static bool is_mounted(void)
{
	struct stat here, above;
	char parent[PATH_MAX];

	snprintf(parent, sizeof(parent), "%s/..", mountpoint);
	CHECK_EQ(stat(mountpoint, &here), 0);
	CHECK_EQ(stat(parent, &above), 0);
	return here.st_dev != above.st_dev;
}

static void end(void)
{
	isw_frontend_destroy(frontend);
	CHECK(!is_mounted());
	engine_stop();
}

#define MOUNTED_TEST(name, completion, requests_max)                                               \
	BETWEEN_TEST(name, start(completion, requests_max), end())

static int open_disk(int flags)
{
	int fd = open(disk, O_RDWR | O_DIRECT | O_CLOEXEC | flags);

	CHECK(fd >= 0);
	return fd;
}

/*
 * Memory at the given distance from a page's start. Up to 63 pages may be unaligned: see
 * REQUEST_BYTES_MAX in fuse.c.
 */
static char *memory_for(size_t bytes, size_t misaligned)
{
	void *memory;

	CHECK_EQ(posix_memalign(&memory, ISW_PAGE_BYTES, bytes + misaligned), 0);
	return (char *)memory + misaligned;
}

static void memory_free(char *memory)
{
	free(memory - (uintptr_t)memory % ISW_PAGE_BYTES);
}

static char *pattern(size_t bytes, size_t misaligned, unsigned int seed)
{
	char *memory = memory_for(bytes, misaligned);
	size_t i;

	for (i = 0; i < bytes; i++)
		memory[i] = (char)rand_r(&seed);
	return memory;
}

static bool holds(off_t offset, const void *data, size_t bytes)
{
	bool same;

	pthread_mutex_lock(&engine.lock);
	same = memcmp(engine.bytes + offset, data, bytes) == 0;
	pthread_mutex_unlock(&engine.lock);
	return same;
}

/* Why. */
static int refused(ssize_t result)
{
	CHECK_EQ(result, -1);
	return errno;
}

/* -------------------------------------------------------------------- tests */

TEST(test_refusals)
{
	struct isw_error error = {0};
	char path[PATH_MAX];
	int err;

	engine_start(INLINE, 4);
	snprintf(path, sizeof(path), "%s/absent", mountpoint);
	err = mount_at(path, &error);
	if (err == -ENOSYS && strstr(error.text, "libfuse3"))
		SKIP("needs a build with libfuse3");
	CHECK_EQ(err, -ENOENT);
	CHECK(strstr(error.text, path) != NULL);
	CHECK(frontend == NULL);
	CHECK_EQ(mount_at("/dev/null", &error), -ENOTDIR);
	CHECK_EQ(mount_at("/dev/null", NULL), -ENOTDIR);
	CHECK(!engine.down);
	engine_stop();
}

/* Of this thread. */
static void set_capabilities(const struct __user_cap_data_struct *data)
{
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};

	CHECK_EQ(syscall(SYS_capset, &header, data), 0);
}

TEST(test_root_without_the_capability_is_told_so)
{
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct had[_LINUX_CAPABILITY_U32S_3];
	struct __user_cap_data_struct less[_LINUX_CAPABILITY_U32S_3];
	struct isw_error error = {0};

	CHECK_EQ(syscall(SYS_capget, &header, had), 0);
	memcpy(less, had, sizeof(less));
	less[0].effective &= ~CAP_TO_MASK(CAP_SYS_ADMIN);
	engine_start(INLINE, 4);
	set_capabilities(less);
	CHECK_EQ(mount_at(mountpoint, &error), -EPERM);
	set_capabilities(had);
	/* Whole: nobody reads what a library has written to standard error. */
	CHECK(strstr(error.text, mountpoint) != NULL);
	CHECK(strstr(error.text, strerror(EPERM)) != NULL);
	CHECK(strstr(error.text, "above") == NULL);
	CHECK(frontend == NULL);
	engine_stop();
}

MOUNTED_TEST(test_names_and_attributes, INLINE, 8)
{
	struct statvfs fs;
	struct stat attr;
	char path[PATH_MAX];

	CHECK(is_mounted());
	CHECK_EQ(stat(disk, &attr), 0);
	CHECK_EQ(attr.st_size, SIZE_BYTES);
	CHECK_EQ(attr.st_mode, S_IFREG | 0600);
	CHECK_EQ(attr.st_blksize, ISW_PAGE_BYTES);
	CHECK_EQ(statvfs(mountpoint, &fs), 0);
	CHECK_EQ(fs.f_bsize, ISW_PAGE_BYTES);
	snprintf(path, sizeof(path), "%s/other", mountpoint);
	CHECK_EQ(refused(stat(path, &attr)), ENOENT);
	CHECK_EQ(open(path, O_CREAT | O_RDWR, 0600), -1);
	CHECK_EQ(refused(truncate(disk, 4096)), EPERM);
	CHECK_EQ(open(disk, O_RDWR | O_TRUNC), -1);
	CHECK_EQ(truncate(disk, SIZE_BYTES), 0);
	snprintf(path, sizeof(path), "[ \"$(ls %s)\" = disk ]", mountpoint);
	CHECK_EQ(system(path), 0);
}

TEST_CASES(test_bytes_of_every_size, 2, reversed)
{
	size_t pages[] = {1, 2, 3, 7, 8, 31, 63, 64, 65, 127, 256, 300, 1000};
	size_t i;
	int fd;

	start(reversed ? REVERSED : INLINE, 16);
	fd = open_disk(0);
	for (i = 0; i < ISWI_ARRAY_LEN(pages); i++) {
		size_t bytes = pages[i] * ISW_PAGE_BYTES;
		off_t offset = (off_t)(i * 4321 % 8000 * ISW_PAGE_BYTES);
		size_t misaligned = pages[i] < 64 ? 1 + i : 0;
		char *wrote = pattern(bytes, misaligned, (unsigned int)i);
		char *got = memory_for(bytes, misaligned);

		CHECK_EQ(pwrite(fd, wrote, bytes, offset), bytes);
		CHECK_EQ(pread(fd, got, bytes, offset), bytes);
		CHECK(memcmp(wrote, got, bytes) == 0);
		CHECK(holds(offset, wrote, bytes));
		memory_free(wrote);
		memory_free(got);
	}
	/* The kernel really sends large requests, not pages. */
	CHECK(counted(&engine.longest_bytes) >= 128u * 1024u);
	close(fd);
	end();
}

MOUNTED_TEST(test_borders, INLINE, 8)
{
	static char data[2 * ISW_PAGE_BYTES];
	int fd;

	fd = open_disk(0);
	CHECK_EQ(refused(pwrite(fd, data, 512, 0)), EINVAL);
	CHECK_EQ(refused(pwrite(fd, data, ISW_PAGE_BYTES, 512)), EINVAL);
	CHECK_EQ(refused(pread(fd, data, 512, 0)), EINVAL);
	CHECK_EQ(pread(fd, data, sizeof(data), SIZE_BYTES), 0);
	CHECK_EQ(pread(fd, data, sizeof(data), SIZE_BYTES - ISW_PAGE_BYTES), ISW_PAGE_BYTES);
	CHECK_EQ(refused(pwrite(fd, data, sizeof(data), SIZE_BYTES - ISW_PAGE_BYTES)), ENOSPC);
	engine_fail_with(-EIO);
	CHECK_EQ(refused(pread(fd, data, sizeof(data), 0)), EIO);
	CHECK_EQ(refused(pwrite(fd, data, sizeof(data), 0)), EIO);
	CHECK_EQ(fsync(fd), -1);
	engine_fail_with(0);
	close(fd);
}

/* Without O_DIRECT too: nothing may be kept in the page cache, where it would count twice. */
MOUNTED_TEST(test_nothing_is_cached, INLINE, 8)
{
	char *page = memory_for(ISW_PAGE_BYTES, 0);
	uint64_t before;
	int fd;

	fd = open(disk, O_RDWR | O_CLOEXEC);
	CHECK(fd >= 0);
	CHECK_EQ(pread(fd, page, ISW_PAGE_BYTES, 0), ISW_PAGE_BYTES);
	before = counted(&engine.submitted);
	CHECK_EQ(pread(fd, page, ISW_PAGE_BYTES, 0), ISW_PAGE_BYTES);
	CHECK_EQ(counted(&engine.submitted), before + 1);
	page[0] = 'x';
	CHECK_EQ(pwrite(fd, page, ISW_PAGE_BYTES, 0), ISW_PAGE_BYTES);
	CHECK(holds(0, page, ISW_PAGE_BYTES));
	close(fd);
	memory_free(page);
}

MOUNTED_TEST(test_flush_and_holes, REVERSED, 8)
{
	const int keep = FALLOC_FL_KEEP_SIZE;
	static char data[16 * ISW_PAGE_BYTES], zeros[16 * ISW_PAGE_BYTES];
	int fd, fd_sync;

	fd = open_disk(0);
	memset(data, 'x', sizeof(data));
	CHECK_EQ(pwrite(fd, data, sizeof(data), 0), sizeof(data));
	CHECK_EQ(counted(&engine.fua_writes), 0);
	CHECK_EQ(counted(&engine.flushes), 0);
	CHECK_EQ(fsync(fd), 0);
	CHECK_EQ(fdatasync(fd), 0);
	CHECK_EQ(counted(&engine.flushes), 2);

	CHECK_EQ(fallocate(fd, FALLOC_FL_PUNCH_HOLE | keep, 0, 2 * ISW_PAGE_BYTES), 0);
	CHECK_EQ(counted(&engine.trims), 1);
	CHECK_EQ(fallocate(fd, FALLOC_FL_ZERO_RANGE | keep, 4 * ISW_PAGE_BYTES, ISW_PAGE_BYTES), 0);
	CHECK_EQ(counted(&engine.zeros), 1);
	memset(data, 0, 2 * ISW_PAGE_BYTES);
	memset(data + 4 * ISW_PAGE_BYTES, 0, ISW_PAGE_BYTES);
	CHECK(holds(0, data, sizeof(data)));
	CHECK_EQ(fallocate(fd, FALLOC_FL_PUNCH_HOLE | keep, 0, SIZE_BYTES), 0);
	CHECK(holds(0, zeros, sizeof(zeros)));
	CHECK_EQ(refused(fallocate(fd, FALLOC_FL_PUNCH_HOLE | keep, 100, ISW_PAGE_BYTES)), EINVAL);
	CHECK_EQ(refused(fallocate(fd, FALLOC_FL_PUNCH_HOLE | keep, 0, 100)), EINVAL);
	CHECK_EQ(fallocate(fd, 0, 0, SIZE_BYTES), 0); /* preallocation: it is all there */
	CHECK_EQ(counted(&engine.trims) + counted(&engine.zeros), 3);
	CHECK_EQ(refused(fallocate(fd, FALLOC_FL_COLLAPSE_RANGE, 0, ISW_PAGE_BYTES)), EOPNOTSUPP);

	fd_sync = open_disk(O_DSYNC);
	CHECK_EQ(pwrite(fd_sync, data, sizeof(data), 0), sizeof(data));
	CHECK(counted(&engine.fua_writes) + counted(&engine.flushes) > 2);
	close(fd_sync);
	close(fd);
}

static void *hammer(void *arg)
{
	const uint64_t bytes_each = SIZE_BYTES / HAMMERS, first_byte = (uintptr_t)arg * bytes_each;
	unsigned int seed = (unsigned int)(uintptr_t)arg + 1;
	char *mirror = memory_for(bytes_each, 0), *buf = memory_for(MIB, 0);
	int fd = open_disk(0);

	memset(mirror, 0, bytes_each);
	for (int round = 0; round < HAMMER_ROUNDS; round++) {
		size_t bytes = (1u + (unsigned int)rand_r(&seed) % 100) * ISW_PAGE_BYTES;
		uint64_t at = (uint64_t)rand_r(&seed) % (bytes_each - bytes) / ISW_PAGE_BYTES *
			      ISW_PAGE_BYTES;

		if (rand_r(&seed) % 2) {
			memset(mirror + at, rand_r(&seed), bytes);
			CHECK_EQ(pwrite(fd, mirror + at, bytes, (off_t)(first_byte + at)), bytes);
		} else {
			CHECK_EQ(pread(fd, buf, bytes, (off_t)(first_byte + at)), bytes);
			CHECK(memcmp(mirror + at, buf, bytes) == 0);
		}
	}
	close(fd);
	memory_free(mirror);
	memory_free(buf);
	return NULL;
}

/* requests_max below what the kernel sends: our thread waits for buffers and loses nothing. */
TEST_CASES(test_many_threads, 4, n)
{
	static const uint32_t requests_max[] = {64, 64, 2, 1};
	pthread_t threads[HAMMERS];

	start(n == 0 ? INLINE : REVERSED, requests_max[n]);
	for (uintptr_t i = 0; i < HAMMERS; i++)
		CHECK_EQ(pthread_create(&threads[i], NULL, hammer, (void *)i), 0);
	for (int i = 0; i < HAMMERS; i++)
		pthread_join(threads[i], NULL);
	end();
}

static void *read_a_page(void *arg)
{
	char *page = memory_for(ISW_PAGE_BYTES, 0);
	intptr_t got = pread((int)(intptr_t)arg, page, ISW_PAGE_BYTES, 0);

	memory_free(page);
	return (void *)got;
}

static void *destroy(void *arg)
{
	bool released;

	(void)arg;
	isw_frontend_destroy(frontend);
	pthread_mutex_lock(&engine.lock);
	released = engine.completion != HELD;
	pthread_mutex_unlock(&engine.lock);
	return (void *)(intptr_t)released;
}

static void wait_submitted(uint32_t many)
{
	pthread_mutex_lock(&engine.lock);
	while (engine.submitted < many)
		pthread_cond_wait(&engine.changed, &engine.lock);
	pthread_mutex_unlock(&engine.lock);
}

/*
 * More readers than buffers, none answered: destroy must not return before the engine has ended
 * what it holds, those get their bytes, and the ones still queued in the kernel get an error.
 */
TEST(test_destroy_with_requests_in_flight)
{
	pthread_t readers[6], destroyer;
	intptr_t served = 0, fds[6];
	void *result;
	int i;

	start(HELD, 3);
	for (i = 0; i < 6; i++)
		fds[i] = open_disk(0);
	for (i = 0; i < 6; i++)
		CHECK_EQ(pthread_create(&readers[i], NULL, read_a_page, (void *)fds[i]), 0);
	wait_submitted(3);
	CHECK_EQ(pthread_create(&destroyer, NULL, destroy, NULL), 0);
	usleep(50000); /* lets destroy get as far as it can; the checks hold without it */
	engine_complete(REVERSED);
	pthread_join(destroyer, &result);
	CHECK_EQ((intptr_t)result, true);
	for (i = 0; i < 6; i++) {
		pthread_join(readers[i], &result);
		close((int)fds[i]);
		served += (intptr_t)result == ISW_PAGE_BYTES;
	}
	CHECK(served >= 3);
	CHECK(!is_mounted());
	engine_stop();
}

/* As with a loop device still attached: the mount goes, the open file answers errors. */
TEST(test_destroy_while_open)
{
	char *page = memory_for(ISW_PAGE_BYTES, 0);
	int fd;

	start(REVERSED, 4);
	fd = open_disk(0);
	CHECK_EQ(pread(fd, page, ISW_PAGE_BYTES, 0), ISW_PAGE_BYTES);
	end();
	CHECK_EQ(pread(fd, page, ISW_PAGE_BYTES, 0), -1);
	close(fd);
	memory_free(page);
}

MOUNTED_TEST(test_unmounted_by_somebody_else, INLINE, 4)
{
	CHECK_EQ(umount2(mountpoint, 0), 0);
	pthread_mutex_lock(&engine.lock);
	while (!engine.down)
		pthread_cond_wait(&engine.changed, &engine.lock);
	CHECK(engine.down_error < 0);
	pthread_mutex_unlock(&engine.lock);
}

/*
 * The tests run in a child: when one fails with a request unanswered, threads of the child wait
 * in the kernel for a reply that only the child could give. The forced unmount ends that.
 */
int main(void)
{
	int status = 0, ticks;
	pid_t child;

	if (geteuid() != 0)
		SKIP("needs root (mount)");
	if (access("/dev/fuse", R_OK | W_OK) != 0)
		SKIP("needs /dev/fuse");
	CHECK(mkdtemp(mountpoint) != NULL);
	child = fork();
	CHECK(child >= 0);
	if (child == 0)
		exit(run_tests());
	for (ticks = 0; ticks < SECONDS_MAX * 20; ticks++) {
		if (waitpid(child, &status, WNOHANG) == child)
			break;
		usleep(50000);
	}
	if (ticks == SECONDS_MAX * 20) {
		fprintf(stderr, "not done after %d seconds\n", SECONDS_MAX);
		kill(child, SIGKILL);
	}
	while (umount2(mountpoint, MNT_FORCE) == 0 || umount2(mountpoint, MNT_DETACH) == 0)
		;
	if (ticks == SECONDS_MAX * 20)
		waitpid(child, &status, 0);
	rmdir(mountpoint);
	return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}
